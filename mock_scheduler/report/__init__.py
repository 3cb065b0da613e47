"""Reports of alignments, comparisons and recordings: for the terminal, as pages and as JSON."""
