"""Memory of one choice: what rests, what a step adds moment by moment, and what the card and the host show of it."""
