"""Linear operations over packed weights, one file each; `runner.linear` says which one runs when."""
