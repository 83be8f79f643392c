"""`tandem doctor`: checks this host, and reports each problem with its effect on Tandem and a
remedy."""
