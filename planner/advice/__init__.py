"""Advice: what is said of a plan beside the plan: reasons, changes that would help, comparisons, machines ranked."""
