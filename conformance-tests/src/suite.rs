//! Mounts every case as a separate test.

/// Mounts each case of the suite as a `#[test]` named `group::case`. The argument is an expression for the
/// [`Factory`](crate::Factory) under test.
///
/// ```
/// # struct MyStoreFactory;
/// # #[leasehold_conformance::async_trait]
/// # impl leasehold_conformance::Factory for MyStoreFactory {
/// #     fn time(&self) -> leasehold_conformance::Time {
/// #         leasehold_conformance::Time::Virtual
/// #     }
/// #     async fn open(&self) -> Result<Box<dyn leasehold_conformance::Harness>, leasehold_api::Error> {
/// #         Err(leasehold_api::Error::closed())
/// #     }
/// # }
/// leasehold_conformance::suite!(MyStoreFactory);
/// ```
///
/// Two more tests are mounted. `verdict::all_that_is_declared_can_be_tried` fails if the harness cannot try
/// something that the store declares, such as durable tokens without a child process. The suite starts
/// `child::entry` again as a child process.
///
/// To mount the suite twice in one file, put each call into a separate module.
#[macro_export]
macro_rules! suite {
    ($factory:expr) => {
        fn leasehold_mount() -> $crate::Mount {
            $crate::Mount::new($factory, ::std::module_path!())
        }

        mod child {
            #[test]
            fn entry() {
                super::leasehold_mount().child_entry();
            }
        }

        mod verdict {
            #[test]
            fn all_that_is_declared_can_be_tried() {
                super::leasehold_mount().judge();
            }
        }

        $crate::for_each_case!($crate::mount_cases);
    };
}

/// Turns the list of cases into tests. Used by [`suite!`].
#[doc(hidden)]
#[macro_export]
macro_rules! mount_cases {
    ($( $group:ident { $( $case:ident [$($rule:ident)*] [$($need:ident)*]; )* } )*) => {
        $(
            mod $group {
                $(
                    #[test]
                    fn $case() {
                        super::leasehold_mount().run(concat!(stringify!($group), "::", stringify!($case)));
                    }
                )*
            }
        )*
    };
}
