"""The script that ranks of a measuring job run: in a folder of its own, because Python puts a script's folder onto the path."""
