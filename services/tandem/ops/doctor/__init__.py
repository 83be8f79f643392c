"""`tandem doctor`: reports what this host lacks, the effect of each lack, and a remedy."""
