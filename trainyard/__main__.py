from trainyard.cli.main import main

main()
