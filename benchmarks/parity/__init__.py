"""Our mathematics beside that of public libraries, on the same random numbers."""
