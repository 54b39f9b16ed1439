"""Records of a run, their store, and what leaves a run: exports and reports."""
