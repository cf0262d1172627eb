"""Commands: what each command of the console script does, loaded when it is called."""
