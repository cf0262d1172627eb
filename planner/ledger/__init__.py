"""The ledger of one choice: every byte with its formula and source, edited at will, beside the textbook."""
