"""A run before it starts: what is to be written, whether its libraries take it, and its folder."""
