"""The command line. Each verb has a file; `main` lists them."""
