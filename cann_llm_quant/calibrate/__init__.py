"""Calibration: windows of text through one decoder layer at a time; returns statistics, never changes a weight."""
