"""`python -m hybrid_rlhf COMMAND`: the console script, of this interpreter's environment."""

from hybrid_rlhf.cli.main import main

if __name__ == "__main__":
    main()
