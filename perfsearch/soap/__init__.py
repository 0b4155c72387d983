"""Parallelisation operator by operator: samples, operators, attributes and parameters (SOAP)."""
