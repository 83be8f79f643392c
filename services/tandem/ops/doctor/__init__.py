"""`tandem doctor`: what this host lacks, what each lack costs, and what to do about it."""
