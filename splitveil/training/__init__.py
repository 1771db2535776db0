"""Training a split model: from a Config to a finished run folder."""
