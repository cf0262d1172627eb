"""What numbers rest on: traces and measurements, made in children and kept in the cache."""
