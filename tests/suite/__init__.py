"""The shared suite: every method x every ISA it runs on x seeded convolutions. `python -m tests.suite --help`
repeats one case."""
