"""Checks of Trainium's rules on dry runs."""
