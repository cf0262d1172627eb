"""A run as text: a candidate of a plan turned into the files of its run folder; nothing is written here."""
