"""Hosts: several processes as one program: how they start, exchange values, and fetch whole arrays."""
