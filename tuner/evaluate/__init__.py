"""The judge and the timer. The only package that imports torch."""
