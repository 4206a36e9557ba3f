"""A saved model where others call it: many files, HTTP requests, Triton's server. Engines are theirs."""
