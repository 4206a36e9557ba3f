"""From a model to a Graph: `export` (torch), `fuse` (batch norm folded, epilogues joined to their
convolution)."""
