"""The search: command line, loop, sampler, pools, worker and judge."""
