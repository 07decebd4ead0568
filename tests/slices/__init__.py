"""Six core types, each tested in a short run from end to end."""
