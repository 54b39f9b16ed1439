"""Who proposes sketches and seeds: hand-written ones here, a language model elsewhere."""
