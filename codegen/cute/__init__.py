"""The translator: a bound TL program becomes a plan, and the plan becomes CuTe source."""
