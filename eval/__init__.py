"""Samples, metrics, records, tables and figures: everything about evaluation that needs no model."""
