"""The space of choices, and the search for the best and the longest that fit."""
