"""YAML options, packaged as perfsearch.conf."""
