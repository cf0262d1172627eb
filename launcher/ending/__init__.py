"""How a run ended: judged from exit, log and metrics, put on record, and held against its prediction."""
