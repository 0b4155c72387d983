"""Views of the journal: MLflow, exports, reports."""
