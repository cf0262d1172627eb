"""Precision routes: which run here, and what one changes in memory and time."""
