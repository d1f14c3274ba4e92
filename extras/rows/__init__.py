"""Rows of data that are conversations or answers, logs of requests, and their tests."""
