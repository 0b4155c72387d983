"""What ranks build from knobs."""
