"""Time of one choice: counted work at the rates that a machine reaches, and what a whole run takes."""
