"""`tandem doctor`: reports what this host lacks, the cost of each lack, and a remedy."""
