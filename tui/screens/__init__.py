"""The six screens and the modal ones."""
