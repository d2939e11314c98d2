"""The n-gram table: split, row reader, disk probe."""
