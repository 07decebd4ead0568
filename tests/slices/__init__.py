"""Six nouns, each proven once before anything was built on them."""
