"""Everystep beside other libraries; each module imports the one it is named after."""
