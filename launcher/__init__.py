"""Side effects: cards, stack, hub, data, writing, running, watching, and every headless command."""
