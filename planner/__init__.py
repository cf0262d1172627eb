"""The pure part: documents, rules, memory, time, search, explanation. No torch, no files, no clock."""
