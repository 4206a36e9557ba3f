"""Random whole networks against float64 eager: `python -m tests.fuzz.networks --seed 1 --count 100`."""
