"""Offer load, stamp arrivals, parse afterwards."""
