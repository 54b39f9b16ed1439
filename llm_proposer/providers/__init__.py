"""Ways to reach a model, one file each: payload out, text in."""
