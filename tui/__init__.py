"""Screens and widgets over the planner and the launcher; holds the console script."""
