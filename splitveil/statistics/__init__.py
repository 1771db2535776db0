"""Statistics of features by class: moments, clusterings and rates. Pure functions that import nothing else of splitveil."""
