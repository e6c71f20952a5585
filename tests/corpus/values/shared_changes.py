def for_long_context(args):
    args.packing = True
