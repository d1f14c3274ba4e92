"""Servers over HTTP: addresses with secrets, bounded answers, identities."""
