"""Parts of single benchmark programs, which their names begin with."""
